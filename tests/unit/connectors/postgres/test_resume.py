from __future__ import annotations

import orjson
from hypothesis import given
from hypothesis import strategies as st

from anabranch_connectors.postgres.copying import CopiedChunk
from anabranch_connectors.postgres.resume import Resume
from anabranch_connectors.postgres.slots import StoredPosition
from anabranch_connectors.postgres.snapshot import Snapshot
from anabranch_source.bootstrap import RESUME

LSN = st.integers(0, (1 << 64) - 1)
XID = st.integers(3, (1 << 63) - 1)
KEY = st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=9).map(str.encode)
SNAPSHOTS = st.builds(Snapshot, XID, XID, st.frozensets(XID, max_size=3))
CHUNKS = st.builds(CopiedChunk, st.sampled_from(["public.t", 'a."b c"']), KEY, KEY, SNAPSHOTS, LSN)


@given(
    st.builds(
        Resume,
        lsn=LSN,
        commit_lsn=LSN,
        system_id=st.sampled_from(["", "7710592335271214584"]),
        timeline=st.integers(0, 9),
        streamed_xids=st.lists(XID, max_size=3).map(tuple),
        last_seq=st.just(0),
        chunks=st.lists(CHUNKS, max_size=2).map(tuple),
        emptied_first=st.booleans(),
    )
)
def test_a_token_goes_there_and_back(resume: Resume) -> None:
    assert Resume.decode(resume.encode()) == resume


@given(LSN, st.integers(1, 1 << 32))
def test_the_next_ordinal_belongs_to_its_position(seq: int, ordinal: int) -> None:
    resume = Resume(lsn=seq, commit_lsn=0, last_seq=seq, next_ordinal=ordinal)
    assert Resume.decode(resume.encode()) == resume


def test_a_settled_streams_token_is_short_and_readable() -> None:
    token = Resume(lsn=0x1_0000_00AB, commit_lsn=0x10, system_id="77", timeline=1).encode()
    assert orjson.loads(token) == {"lsn": "1/AB", "commit": "0/10", "system_id": "77", "timeline": 1}


def test_what_bootstrap_writes_means_a_new_beginning() -> None:
    assert Resume.decode(RESUME) is None


def test_the_stored_position_is_what_slots_are_compared_with() -> None:
    assert Resume(lsn=5, commit_lsn=4, system_id="77", timeline=2).stored == StoredPosition(5, "77", 2)
