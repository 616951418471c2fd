"""What only a runner needs: buffers, the clock, splits, threads, delivery."""
