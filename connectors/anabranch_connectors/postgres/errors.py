"""The errors of speaking to PostgreSQL.

    AnabranchError
    ├── ConnectError             connect.refused             no server could be reached; passes
    ├── AuthenticationError      connect.authentication      the server or its certificate refuses us
    ├── ProtocolError            connect.protocol            the peer does not speak PostgreSQL's protocol
    ├── ServerError              postgres.server             the server answered with an error (has `sqlstate`)
    │   └── TransientServerError postgres.server_transient   one that passes: a restart, a lack of resources
    ├── ReplicationEndedError    source.replication_ended    the server closed the stream; passes
    ├── SlotError                                            the slot and the stored position disagree
    │   ├── SlotMissingError     source.slot_missing
    │   ├── SlotForeignError     source.slot_foreign
    │   ├── SlotLostError        source.slot_lost
    │   ├── SlotAheadError       source.slot_ahead
    │   ├── BranchChangedError   source.branch_changed
    │   └── SlotInUseError       source.slot_in_use          passes when the other reader has gone
    ├── PublicationForeignError  source.publication_foreign  another stream owns the publication
    ├── PublicationIncompleteError source.publication_incomplete  changes would be left out
    ├── PublicationMissingError  source.publication_missing  the publication went away under a stored position
    ├── MarkersMissingError      source.markers_missing      the stream has begun, but its markers are gone
    ├── WalLevelError            source.wal_level            the log does not hold row changes
    ├── TableMissingError        source.table_missing        no table of that name or oid
    └── TableKeyError            source.table_without_key    rows of the table cannot be told apart

Each says in its advice what repairs it; `server_error` turns the server's own errors into this tree.
"""

from __future__ import annotations

from collections.abc import Mapping

from anabranch_schemas.errors import Action, AnabranchError

# Classes of SQLSTATE that pass by themselves: connection trouble, resources, operator intervention (restart).
_PASSING_CLASSES = frozenset({"08", "40", "53", "57", "58"})
_AUTHENTICATION_CLASS = "28"
# Messages of data and constraint errors quote values of rows; they are not repeated.
_QUOTES_VALUES = frozenset({"22", "23"})

# What repairs a stream whose slot or history is lost, whatever the reason: copy again, merge at the target.
BOOTSTRAP = "run `anabranch bootstrap FILE --source NAME` to take a new slot and copy the tables again"


class ConnectError(AnabranchError):
    """No server of the connection string could be reached."""

    code = "connect.refused"
    action = Action.RETRY


class AuthenticationError(AnabranchError):
    """The server refuses the user, or its certificate is not one that we accept."""

    code = "connect.authentication"


class ProtocolError(AnabranchError):
    """The peer answered with something that PostgreSQL's protocol does not have at this point."""

    code = "connect.protocol"


class ServerError(AnabranchError):
    """The server answered with an error; `sqlstate` is its five-character code.

    Only the primary message is kept: detail and context may quote row values.
    """

    code = "postgres.server"

    def __init__(self, message: str, *, sqlstate: str, where: str = "", advice: str = "") -> None:
        super().__init__(message, where=where, advice=advice)
        self.sqlstate = sqlstate


class TransientServerError(ServerError):
    """An error of the server that passes by itself: a restart, a lack of resources, a broken connection."""

    code = "postgres.server_transient"
    action = Action.RETRY


class ReplicationEndedError(AnabranchError):
    """The server closed the replication stream without an error of its own."""

    code = "source.replication_ended"
    action = Action.RETRY


class SlotError(AnabranchError):
    """The slot cannot give the stream that the stored position asks for."""

    code = "source.slot"


class SlotMissingError(SlotError):
    """The slot is gone, so the log after the stored position is not kept."""

    code = "source.slot_missing"


class SlotForeignError(SlotError):
    """A slot of that name exists, but for another plugin or database."""

    code = "source.slot_foreign"


class SlotLostError(SlotError):
    """The server has invalidated the slot: log that we need has been removed."""

    code = "source.slot_lost"


class SlotAheadError(SlotError):
    """The slot is confirmed beyond the stored position: changes in between would be skipped without a word."""

    code = "source.slot_ahead"


class BranchChangedError(SlotError):
    """The server's history is not the one that the stored position belongs to."""

    code = "source.branch_changed"


class SlotInUseError(SlotError):
    """Another connection reads the slot."""

    code = "source.slot_in_use"
    action = Action.RETRY


class PublicationForeignError(AnabranchError):
    """The publication belongs to another stream, or to a user who did not offer it."""

    code = "source.publication_foreign"


class PublicationIncompleteError(AnabranchError):
    """The publication leaves out operations, or sends partitions under their own names."""

    code = "source.publication_incomplete"


class PublicationMissingError(AnabranchError):
    """The publication is gone although the stream has a stored position."""

    code = "source.publication_missing"


class TableMissingError(AnabranchError):
    """The catalog has no such table."""

    code = "source.table_missing"


class TableKeyError(AnabranchError):
    """A table's rows cannot be told apart: it has no key."""

    code = "source.table_without_key"


def server_error(fields: Mapping[str, str], *, where: str = "") -> AnabranchError:
    """Return the error that an ErrorResponse stands for.

    `fields` maps the protocol's one-letter field codes to texts (C SQLSTATE, M primary message).
    """
    sqlstate = fields.get("C", "XX000")
    kind = sqlstate[:2]
    message = "the server refused the data" if kind in _QUOTES_VALUES else fields.get("M", "unknown error")
    message = f"{message} (SQLSTATE {sqlstate})"
    if kind == _AUTHENTICATION_CLASS:
        return AuthenticationError(message, where=where, advice="check user, password and pg_hba.conf of the server")
    if kind in _PASSING_CLASSES:
        return TransientServerError(message, sqlstate=sqlstate, where=where)
    return ServerError(message, sqlstate=sqlstate, where=where)


class MarkersMissingError(AnabranchError):
    """The source says that the stream has begun, but its markers are gone, and with them its position."""

    code = "source.markers_missing"


class WalLevelError(AnabranchError):
    """The server writes a log that cannot be decoded."""

    code = "source.wal_level"
