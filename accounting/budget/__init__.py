"""The budget of a plan: shares, calibration, thresholds and tests."""
