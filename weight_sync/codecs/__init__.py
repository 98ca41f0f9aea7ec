"""What is sent of a version: pure functions over bytes. Nothing is moved here."""
