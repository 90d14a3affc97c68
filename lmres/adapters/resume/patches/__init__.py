"""The places in torch where the engine looks and, on the way back, stands in.

Each module here installs its patches once, when torch has been imported. Outside of a way back a patch costs one test
and one call. Nothing is patched in a process that is not the worker; a forked child passes everything through.
"""
