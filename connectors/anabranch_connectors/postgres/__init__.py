"""The PostgreSQL connector (14 to 18)."""
