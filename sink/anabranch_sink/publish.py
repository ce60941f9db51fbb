"""From receipts to a publication: what the tasks found is checked against the markers, then named to the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from anabranch_connectors.api import Publication, StagedTable, Truncation, Unit
from anabranch_sink import ranges as exact
from anabranch_sink.ranges import MarkedRange
from anabranch_sink.stage import Receipt


def publication(
    receipts: Sequence[Receipt],
    marked: Sequence[MarkedRange],
    base: Publication,
    *,
    per_unit: bool,
    park: bool,
) -> Publication:
    """Return what to apply: `base`, which has progress and versions, with what the tasks staged.

    Raises:
        RangeMismatchError: if the tasks did not find what the markers say.
    """
    found: dict[int, tuple[int, int]] = {}
    for receipt in receipts:
        for index, (rows, digest) in receipt.found.items():
            before = found.get(index, (0, 0))
            found[index] = before[0] + rows, before[1] + digest
    exact.check(marked, found)
    truncations = {Truncation(*truncation) for receipt in receipts for truncation in receipt.truncations}
    return replace(
        base,
        staged=tuple(_staged(receipts, per_unit=per_unit)),
        truncations=tuple(sorted(truncations)),
        units=_units(receipts) if per_unit else None,
        park=park,
    )


def _staged(receipts: Sequence[Receipt], *, per_unit: bool) -> list[StagedTable]:
    versions = sorted({version for receipt in receipts for version in receipt.staged})
    staged = []
    for version in versions:
        holding = [receipt for receipt in receipts if version in receipt.staged]
        staged.append(
            StagedTable(
                version=version,
                attempts=tuple(receipt.attempt for receipt in holding),
                rows=sum(receipt.staged[version][0] for receipt in holding),
                cells=sum(receipt.staged[version][1] for receipt in holding),
                # One unit at a time, a key is staged once unless its task staged in several goes.
                repeated=any(receipt.repeated for receipt in holding),
            )
        )
    assert per_unit or all(table.rows for table in staged)
    return staged


def _units(receipts: Sequence[Receipt]) -> tuple[Unit, ...]:
    """Merge what the tasks saw of each unit; order by hybrid time, which no cause has after its effect."""
    merged: dict[tuple[str, int, int, int | None], Unit] = {}
    for receipt in receipts:
        for (stream, marker, seq, ordinal), facts in receipt.units.items():
            known = merged.get((stream, marker, seq, ordinal))
            places = [(*place, *extent) for place, extent in facts.places.items()]
            before = known.places if known else ()
            merged[stream, marker, seq, ordinal] = Unit(
                stream, marker, facts.hlc, seq, ordinal, facts.txid, (*before, *places)
            )
    return tuple(sorted(merged.values(), key=lambda u: (u.hlc, u.stream, u.marker, u.seq, u.ordinal or 0)))
