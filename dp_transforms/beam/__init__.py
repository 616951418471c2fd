"""Parts that only a Beam runner needs: buffers, the clock, splits, threads, delivery."""
