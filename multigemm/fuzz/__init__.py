"""The fuzzer: campaigns of generated problems over backends, their failures made small."""
