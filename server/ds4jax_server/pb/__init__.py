"""Generated from proto/ds4jax/v1/generation.proto. Made anew, from the root of a checkout, by

python -m grpc_tools.protoc -I ds4jax_server/pb=proto/ds4jax/v1 --python_out=server \
    --pyi_out=server --grpc_python_out=server proto/ds4jax/v1/generation.proto
"""
