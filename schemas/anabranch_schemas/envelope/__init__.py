"""The Debezium-compatible envelope: names, Avro schemas, varints, and the header for cells it cannot hold."""
