"""Where releases go: files, Kafka, Pub/Sub, BigQuery; each idempotent by release id."""
