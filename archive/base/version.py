"""Pure, no I/O: the version of the library (not of the format, which archive.base.layout has)."""

__version__ = "0.1.0"
