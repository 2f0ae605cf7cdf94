"""The gRPC server of ds4jax: service, conversion, health, metrics. Needs the extra `server`."""
