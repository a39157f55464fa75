"""torch versions of the mmcv ops that a DETR calls, one file per family.

Every function keeps the argument order, the keyword names and the in-place
convention of its C++ namesake, because mmcv's own Python wrappers call it.
"""
