"""From a problem to a launch: staging, binding, plans, and the cache of bound launches."""
