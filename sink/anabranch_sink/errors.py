"""The sink's own errors; what a target can refuse is in anabranch_connectors.target_errors.

AnabranchError
└── SinkError                sink.failed
├── MarkerGapError       sink.marker_gap      a marker number is missing
├── StreamResetError     sink.stream_reset    the stream began anew or went back
├── TopicMissingError    sink.topic_missing   a topic that markers name does not exist
├── RangeExpiredError    sink.range_expired   retention took offsets before they were applied
├── RangeMismatchError   sink.range_mismatch  a range does not hold what its marker says
├── VersionUnknownError  sink.version_unknown a record's schema is not one that the markers name
├── JobFailedError       sink.job_failed      a Spark job failed for a reason that is not ours
└── KafkaReadError       sink.kafka           Kafka could not be read; passes when it is back
"""

from __future__ import annotations

from anabranch_schemas.errors import Action, AnabranchError

BOOTSTRAP = "run `anabranch bootstrap FILE --source {source}` to copy its tables anew"


def bootstrap_advice(stream: str) -> str:
    """Return the command that starts a stream anew; the source's name is the stream's behind the site."""
    return BOOTSTRAP.format(source=stream.rpartition(".")[2])


class SinkError(AnabranchError):
    """The base of the sink's own errors."""

    code = "sink.failed"


class MarkerGapError(SinkError):
    """A marker number is missing between what is applied and what is on Kafka."""

    code = "sink.marker_gap"


class StreamResetError(SinkError):
    """The stream on Kafka is not the continuation of what is applied."""

    code = "sink.stream_reset"


class TopicMissingError(SinkError):
    """A topic that the markers name does not exist."""

    code = "sink.topic_missing"


class RangeExpiredError(SinkError):
    """Kafka has deleted offsets of a marker that is not applied yet."""

    code = "sink.range_expired"


class RangeMismatchError(SinkError):
    """A range holds other records than its marker counted."""

    code = "sink.range_mismatch"


class VersionUnknownError(SinkError):
    """A record is framed with a schema id that the cut's markers do not name for its topic."""

    code = "sink.version_unknown"


class JobFailedError(SinkError):
    """A Spark job failed for a reason that is not ours (an executor was lost, a worker died)."""

    code = "sink.job_failed"
    action = Action.RETRY


class KafkaReadError(SinkError):
    """Kafka could not be read; passes when it is back."""

    code = "sink.kafka"
    action = Action.RETRY
