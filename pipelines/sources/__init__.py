"""Where records come from: files, recordings, folders that grow, Kafka, Pub/Sub."""
