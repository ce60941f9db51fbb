"""The front door: command line, pipelines, the embedded stack, verification."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("anabranch")
except PackageNotFoundError:  # run from a wheel on Spark's path, which has no metadata
    __version__ = "0"
