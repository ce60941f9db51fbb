"""From a database to Kafka."""
