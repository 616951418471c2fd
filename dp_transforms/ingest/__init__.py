"""Records on their way in: columns in canonical form, keyed ids, refused rows."""
