"""The version, in a module of its own: the command line prints it without loading more."""

__version__ = "0.1.0"
