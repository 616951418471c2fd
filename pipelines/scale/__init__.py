"""`dpstream plan --scale`: what a load needs."""
