"""What can go wrong between a source and Kafka.

AnabranchError
├── SourceFencedError     source.fenced            another worker has taken the stream over
├── PublishError          source.publish           Kafka did not take a snapshot; nothing was lost
├── RecordTooLargeError   source.record_too_large  a row is greater than a record may be
└── TopicMissingError     source.topic_missing     a topic of the stream was deleted
"""

from __future__ import annotations

from anabranch_schemas.errors import Action, AnabranchError


class SourceFencedError(AnabranchError):
    """Another worker has taken the stream over; this one must not go on."""

    code = "source.fenced"


class PublishError(AnabranchError):
    """Kafka did not take a snapshot. The slot has not moved, so it is read again."""

    code = "source.publish"
    action = Action.RETRY


class RecordTooLargeError(AnabranchError):
    """A row is greater than a record may be. Nothing behind it is published until it is let through."""

    code = "source.record_too_large"


class TopicMissingError(AnabranchError):
    """A topic of the stream was deleted while it was being written."""

    code = "source.topic_missing"
