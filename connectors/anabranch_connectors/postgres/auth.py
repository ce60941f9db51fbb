"""Authentication at a PostgreSQL server: cleartext, MD5, SCRAM-SHA-256 and SCRAM-SHA-256-PLUS."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from typing import Any

import scramp

from anabranch_connectors.postgres.errors import AuthenticationError, ProtocolError, server_error
from anabranch_connectors.postgres.messages import Conversation, Message, error_fields, frame

_OK, _CLEARTEXT, _MD5, _SASL, _SASL_CONTINUE, _SASL_FINAL = 0, 3, 5, 10, 11, 12
_UNSUPPORTED = {2: "Kerberos V5", 7: "GSSAPI", 9: "SSPI"}
_PLUS = "-PLUS"


@dataclass(frozen=True, slots=True)
class Credentials:
    """Who we are; the password never shows in a repr.

    `tls` is the TLS socket (or object) whose server certificate the authentication is bound to, None without TLS.
    `channel_binding` is libpq's option: `disable`, `prefer` or `require`.
    """

    user: str
    password: str | None = field(default=None, repr=False)
    tls: Any = None
    channel_binding: str = "prefer"


def authenticate(request: Message, credentials: Credentials) -> Conversation[None]:
    """Answer the server's authentication `request`, and return when it has accepted us.

    Raises:
        AuthenticationError: if it refuses, or asks for what we cannot or must not give.
    """
    method, rest = _authentication(request)
    if credentials.channel_binding == "require" and method != _SASL:
        raise AuthenticationError(
            "the server asks for a method without channel binding, and channel_binding=require forbids it",
            advice="let pg_hba.conf ask for scram-sha-256 on a hostssl line",
        )
    match method:
        case 0:  # _OK: trust, peer, or a client certificate
            return
        case 3:  # _CLEARTEXT
            reply = yield _password_message(_password(credentials).encode())
        case 5:  # _MD5
            reply = yield _password_message(md5_password(credentials.user, _password(credentials), rest[:4]))
        case 10:  # _SASL
            reply = yield from _scram(rest, credentials)
        case _:
            name = _UNSUPPORTED.get(method, f"number {method}")
            raise AuthenticationError(
                f"the server asks for authentication by {name}",
                advice="use scram-sha-256, md5, password, cert, peer or trust in pg_hba.conf for this user",
            )
    if _authentication(reply)[0] != _OK:
        raise ProtocolError("authentication did not end where it should")


def md5_password(user: str, password: str, salt: bytes) -> bytes:
    """Return the answer to an MD5 request: md5(md5(password || user) || salt), in hexadecimal."""
    inner = hashlib.md5((password + user).encode(), usedforsecurity=False).hexdigest()
    return b"md5" + hashlib.md5(inner.encode() + salt, usedforsecurity=False).hexdigest().encode()


def _scram(offered: bytes, credentials: Credentials) -> Conversation[Message]:
    password = _password(credentials)
    try:
        client = _scram_client(_mechanisms(offered, credentials), password, credentials)
        first = client.get_client_first().encode()
        name = client.mechanism_name.encode() + b"\0"
        challenge = yield frame(b"p", name + struct.pack("!I", len(first)) + first)
        client.set_server_first(_expect(challenge, _SASL_CONTINUE).decode())
        outcome = yield frame(b"p", client.get_client_final().encode())
        # The server proves here that it knows the password too: this refuses an impostor without certificates.
        client.set_server_final(_expect(outcome, _SASL_FINAL).decode())
    except scramp.ScramException as error:
        raise AuthenticationError("SCRAM authentication failed", advice="check the password of the user") from error
    return (yield b"")


def _mechanisms(offered: bytes, credentials: Credentials) -> list[str]:
    names = [name.decode() for name in offered.split(b"\0") if name.startswith(b"SCRAM-SHA-256")]
    bindable = credentials.tls is not None and credentials.channel_binding != "disable"
    if credentials.channel_binding == "require":
        names = [name for name in names if name.endswith(_PLUS)] if bindable else []
    elif not bindable:
        names = [name for name in names if not name.endswith(_PLUS)]
    if not names:
        raise AuthenticationError(
            "the server offers no SCRAM mechanism that may be used here",
            advice="connect by TLS, or set channel_binding=prefer",
        )
    return names


def _scram_client(mechanisms: list[str], password: str, credentials: Credentials) -> Any:
    binding = None
    if credentials.tls is not None and credentials.channel_binding != "disable":
        binding = ("tls-server-end-point", credentials.tls)
    # The server takes the user from the startup message and ignores this one.
    return scramp.ScramClient(mechanisms, credentials.user, password, channel_binding=binding)


def _password(credentials: Credentials) -> str:
    if credentials.password is None:
        raise AuthenticationError(
            f"the server asks for a password of user {credentials.user!r} and none is given",
            advice="put it into the DSN (${env:NAME} or ${file:PATH}), PGPASSWORD or a password file",
        )
    return credentials.password


def _password_message(text: bytes) -> bytes:
    return frame(b"p", text + b"\0")


def _authentication(message: Message) -> tuple[int, bytes]:
    if message.type == b"E":
        raise server_error(error_fields(message.body))
    if message.type != b"R" or len(message.body) < 4:
        raise ProtocolError(f"message {message.type!r} during authentication")
    return int.from_bytes(message.body[:4], "big"), message.body[4:]


def _expect(message: Message, method: int) -> bytes:
    got, rest = _authentication(message)
    if got != method:
        raise ProtocolError(f"authentication step {got} where {method} belongs")
    return rest
