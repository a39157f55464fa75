"""Checks the installation and prints the command that mends each problem.

Run ``python -m damex.doctor``. It needs the standard library only, so it also runs
where torch or mmdet is missing or broken. The exit code is 0 if all is well, else 1.
"""
