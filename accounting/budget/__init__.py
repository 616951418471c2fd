"""From a plan to its budget: shares, calibration, thresholds and tests."""
