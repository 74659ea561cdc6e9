"""What reading few keys of a long context costs: sparse attention, sparse prefill, and passkeys by depth."""
