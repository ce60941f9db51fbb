"""The errors of the embedded stack.

StackError                 stack.failed             a service could not be started, stopped or reached
├── JavaMissingError       stack.java_missing       no Java that is new enough
├── JarDownloadError       stack.jar_download       jars that are not in the cache could not be fetched
├── JarChecksumError       stack.jar_checksum       a jar is not the file that the lock names
├── PostgresMissingError   stack.postgres_missing   no PostgreSQL server binaries
└── ServiceStartError      stack.start              a service ended, or did not answer, while it was starting
"""

from __future__ import annotations

from anabranch_schemas.errors import Action, AnabranchError

__all__ = [
    "JarChecksumError",
    "JarDownloadError",
    "JavaMissingError",
    "PostgresMissingError",
    "ServiceStartError",
    "StackError",
]


class StackError(AnabranchError):
    """A service of the stack could not be started, stopped or reached."""

    code = "stack.failed"


class JavaMissingError(StackError):
    """No Java that is new enough was found."""

    code = "stack.java_missing"


class JarDownloadError(StackError):
    """Jars that are not in the cache could not be fetched."""

    code = "stack.jar_download"
    action = Action.RETRY


class JarChecksumError(StackError):
    """A jar is not the file that the lock names; it was removed."""

    code = "stack.jar_checksum"


class PostgresMissingError(StackError):
    """No PostgreSQL server binaries were found."""

    code = "stack.postgres_missing"


class ServiceStartError(StackError):
    """A service ended, or did not answer, while it was starting."""

    code = "stack.start"
