"""The experiments of the source papers, run on the classes that the detector uses."""
