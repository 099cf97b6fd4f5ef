"""The HTTP side: processes that speak OpenAI's API to clients and ``serving.wire`` to rank 0. Nothing here imports torch."""
