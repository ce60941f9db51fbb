"""Rows on their way in: Avro bytes straight to the fields of PostgreSQL's binary COPY, by generated functions.

The functions read what may be foreign or cut-off bytes. They check cheaply: every read either raises or moves the
offset beyond the end, which the last line of each function notices; all that Python can raise becomes RowDecodeError.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from anabranch_connectors.postgres.types import CellDecoder, RowDecodeError, decoder_for
from anabranch_schemas.envelope.avro import read_table
from anabranch_schemas.envelope.varint import PADDING, read_unsigned
from anabranch_schemas.table import Column

__all__ = ["RowDecodeError", "RowDecoder", "StagedColumn", "compile_decoder"]

NULL_FIELD = b"\xff\xff\xff\xff"
"""A NULL in binary COPY: length -1."""
# Short strings take their length prefix from a table, by the zigzag byte; a negative length finds None, which no join
# takes.
_SHORT = [None if n & 1 else struct.pack("!i", n >> 1) for n in range(128)]
_RUN_LIMIT = 64


@dataclass(frozen=True, slots=True)
class StagedColumn:
    """A column of the staging table: `staging_type` is the type whose binary form the decoder emits."""

    name: str
    staging_type: str


@dataclass(frozen=True, slots=True)
class RowDecoder:
    """The decoders of one table and schema version; all functions raise RowDecodeError and nothing else."""

    columns: tuple[StagedColumn, ...]
    key_columns: tuple[StagedColumn, ...]
    after: Callable[[bytes], bytes]
    """Confluent-framed value -> the fields of its after-image, one behind the other."""
    after_fields: Callable[[bytes], list[bytes]]
    """Confluent-framed value -> the same, one item a column."""
    key_fields: Callable[[bytes], list[bytes]]
    """Confluent-framed key -> one field a key column, in key order."""


def compile_decoder(envelope_schema: dict[str, Any], key_schema: dict[str, Any]) -> RowDecoder:
    """Generate the decoders for records of the two Avro schemas, which must be ours.

    Raises:
        TypeMappingError: if the schemas were not made by `anabranch_schemas.envelope.avro`.
    """
    table = read_table(envelope_schema, key_schema)
    value = _Source(table.path, table.columns)
    key = _Source(table.path, table.key_columns)
    return RowDecoder(
        columns=value.staged,
        key_columns=key.staged,
        after=value.after(fused=True),
        after_fields=value.after(fused=False),
        key_fields=key.key(),
    )


class _Source:
    """Writes the source of one record's functions and compiles it.

    Local names: `v` buffer, `o` offset, `u` union branch, `c3` the value of column 3 for a fixed-width field, `p3` and
    `d3` length prefix and data of a variable one.
    """

    def __init__(self, table: str, columns: tuple[Column, ...]) -> None:
        self._table = table
        self._columns = columns
        self._decoders = [decoder_for(column.type, column.source_type) for column in columns]
        self.staged = tuple(
            StagedColumn(column.name, decoder.staging) for column, decoder in zip(columns, self._decoders, strict=True)
        )
        self._names: dict[str, object] = {
            "join": b"".join,
            "NULL": NULL_FIELD,
            "PADDING": PADDING,
            "SHORT": _SHORT,
            "size": struct.Struct("!i").pack,
            "unsigned": read_unsigned,
            "RowDecodeError": RowDecodeError,
            "ERRORS": (IndexError, KeyError, OverflowError, TypeError, ValueError, struct.error),
            "TABLE": table,
        }
        for at, decoder in enumerate(self._decoders):
            self._names |= decoder.names
            self._names[f"F{at}"] = decoder.call or decoder.convert
            self._names[f"PREFIX{at}"] = decoder.prefix
            if decoder.fixed:
                self._names[f"PACK{at}"] = struct.Struct("!i" + decoder.fixed).pack

    def after(self, *, fused: bool) -> Callable[[bytes], Any]:
        """Compile `after` (one bytes) or, not fused, `after_fields` (a list)."""
        name = "after" if fused else "after_fields"
        self._names["skip"] = self._compile("skip(v, o)", [*self._skip(), "return o"], guarded=False)
        head = [
            "o = 6",
            "if v[0]: raise ValueError('frame')",
            "if v[5] == 2: o = skip(v, 6)",
            "elif v[5]: raise ValueError('union')",
            "if v[o] != 2: raise ValueError('no after-image')",
            "o += 1",
        ]
        end = "if o > len(v): raise ValueError('cut off')"
        return self._compile(f"{name}(v)", [*head, *self._body(end, fused=fused)], guarded=True)

    def key(self) -> Callable[[bytes], list[bytes]]:
        """Compile `key_fields`."""
        head = ["if v[0]: raise ValueError('frame')", "end = len(v); v += PADDING; o = 5"]
        end = "if o != end: raise ValueError('length')"
        return self._compile("key_fields(v)", [*head, *self._body(end, fused=False)], guarded=True)

    def _compile(self, signature: str, body: list[str], *, guarded: bool) -> Callable[..., Any]:
        name = signature.partition("(")[0]
        lines = [f"def {signature}:"]
        if guarded:
            reason = "f'a record is not of its schema: {type(error).__name__}'"
            lines.append(" try:")
            lines += ["  " + line for line in body]
            lines.append(" except ERRORS as error:")
            lines.append(f"  raise RowDecodeError({reason}, where=TABLE) from None")
        else:
            lines += [" " + line for line in body]
        exec(compile("\n".join(lines), f"<decoder of {self._table}>", "exec"), self._names)  # noqa: S102 - our own source
        compiled: Callable[..., Any] = self._names[name]  # type: ignore[assignment]  # put there by exec
        return compiled

    def _body(self, end: str, *, fused: bool) -> Iterator[str]:
        pieces: list[str] = []
        run: list[int] = []
        for at, decoder in enumerate(self._decoders):
            yield from self._cell(at)
            if decoder.fixed and fused:
                run.append(at)
                if len(run) < _RUN_LIMIT:
                    continue
            yield from self._pack_run(run, pieces)
            run = []
            if decoder.fixed and not fused:
                yield f"p{at} = {self._pack_one(at)}"
                pieces.append(f"p{at}")
            elif not decoder.fixed:
                pieces.append(f"p{at}, d{at}" if fused else f"p{at} + d{at}")
        yield from self._pack_run(run, pieces)
        yield end
        yield (
            f"return join(({', '.join(pieces)},))"
            if fused and pieces
            else f"return [{', '.join(pieces)}]"
            if pieces or not fused
            else "return b''"
        )

    def _pack_run(self, run: list[int], pieces: list[str]) -> Iterator[str]:
        if not run:
            return
        pack = struct.Struct("!" + "".join("i" + self._decoders[at].fixed for at in run))
        name = f"PACKS{run[0]}"
        self._names[name] = pack.pack
        fields = ", ".join(f"{self._width(at)}, c{at}" for at in run)
        whole = f"r{run[0]} = {name}({fields})"
        nullable = [f"c{at} is None" for at in run if self._columns[at].nullable]
        if nullable:
            yield f"if {' or '.join(nullable)}: r{run[0]} = {' + '.join(self._pack_one(at) for at in run)}"
            yield f"else: {whole}"
        else:
            yield whole
        pieces.append(f"r{run[0]}")

    def _width(self, at: int) -> int:
        return struct.calcsize("!" + self._decoders[at].fixed)

    def _pack_one(self, at: int) -> str:
        pack = f"PACK{at}({self._width(at)}, c{at})"
        return f"(NULL if c{at} is None else {pack})" if self._columns[at].nullable else pack

    def _cell(self, at: int) -> Iterator[str]:
        """Write the read of one cell, with its union."""
        read = self._read(at, self._decoders[at])
        if not self._columns[at].nullable:
            yield from read
            return
        yield "u = v[o]; o += 1"
        yield "if u == 2:"
        for line in read:
            yield " " + line
        yield f"elif u == 0: {f'c{at} = None' if self._decoders[at].fixed else f'p{at} = NULL; d{at} = b{chr(39) * 2}'}"
        yield "else: raise ValueError('union')"

    def _read(self, at: int, decoder: CellDecoder) -> Iterator[str]:
        value = decoder.inline
        match decoder.read:
            case "bool":
                yield f"c{at} = {value.format(c='v[o]')}; o += 1"
            case "float" | "double":
                width = 4 if decoder.read == "float" else 8
                yield f"c{at} = {value.format(c=f'v[o:o + {width}]')}; o += {width}"
            case "long":
                # Numbers of up to 21 bits in place: a call costs as much as all the rest of a cell.
                yield "n = v[o]"
                yield "if n < 128: o += 1"
                yield "elif (m := v[o + 1]) < 128: n += (m << 7) - 128; o += 2"
                yield "elif (l := v[o + 2]) < 128: n += (m << 7) + (l << 14) - 16512; o += 3"
                yield "else: n, o = unsigned(v, o)"
                yield f"c{at} = {value.format(c='(~(n >> 1) if n & 1 else n >> 1)')}"
            case "call":
                yield f"d{at}, o = F{at}(v, o); p{at} = size(len(d{at}))"
            case _:
                yield from self._sized(at, decoder)

    def _sized(self, at: int, decoder: CellDecoder) -> Iterator[str]:
        plain = not (decoder.fixed or decoder.convert or decoder.prefix)
        yield "n = v[o]"
        yield f"if n < 128: s = o + 1; o = s + (n >> 1){f'; p{at} = SHORT[n]' if plain else ''}"
        yield "else:"
        yield " n, s = unsigned(v, o); o = s + (n >> 1)"
        if plain:
            yield f" p{at} = None if n & 1 else size(n >> 1)"
            yield f"d{at} = v[s:o]"
            return
        yield "if n & 1: raise ValueError('length')"
        if decoder.fixed:
            yield f"c{at} = {decoder.inline.format(c='v[s:o]')}"
        elif decoder.convert:
            yield f"d{at} = F{at}(v[s:o]); p{at} = size(len(d{at}))"
        else:
            yield f"d{at} = v[s:o]; p{at} = size((n >> 1) + {len(decoder.prefix)}) + PREFIX{at}"

    def _skip(self) -> Iterator[str]:
        """Write the walk over a record that nobody reads."""
        for at, decoder in enumerate(self._decoders):
            indent = ""
            if self._columns[at].nullable:
                yield "u = v[o]; o += 1"
                yield "if u not in (0, 2): raise ValueError('union')"
                yield "if u:"
                indent = " "
            match decoder.read:
                case "bool":
                    yield f"{indent}o += 1"
                case "float" | "double":
                    yield f"{indent}o += {4 if decoder.read == 'float' else 8}"
                case "long":
                    yield f"{indent}while v[o] > 127: o += 1"
                    yield f"{indent}o += 1"
                case "call":
                    yield f"{indent}o = F{at}(v, o)[1]"
                case _:
                    yield f"{indent}n, o = unsigned(v, o); o += n >> 1"
                    yield f"{indent}if n & 1: raise ValueError('length')"
