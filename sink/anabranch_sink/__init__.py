"""From Kafka to a target, on Spark."""
