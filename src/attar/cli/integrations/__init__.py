"""Commands that make attar a part of other products: `deploy`, an application of Ray Serve."""
