"""The command line of the cas artifact store: parse, call the library, render, exit."""

#: Also the distribution's version. It stands here, in a package that imports nothing, so that
#: `cas --version` need not read the installed metadata, which would take as long as all the rest.
__version__ = "0.1.0"
