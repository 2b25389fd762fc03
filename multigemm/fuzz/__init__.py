"""The fuzzer: campaigns of random problems over backends, whose failures are made small."""
