"""What a run says of itself: metrics, their sinks, timers, and the samples it drew."""
