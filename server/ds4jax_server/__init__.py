"""The gRPC server of ds4jax: service, conversion, health, metrics, process. Needs extra `server`."""
