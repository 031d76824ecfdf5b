"""Schema registries: Confluent, Apicurio and Karapace over REST, and AWS Glue."""
