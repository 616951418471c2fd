"""Invented offices: parameter files, geography and records of people whom there are not."""
