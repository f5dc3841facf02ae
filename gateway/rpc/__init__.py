"""The gRPC front: protobuf and statuses on one side, gateway/service.py's typed records on the other."""
