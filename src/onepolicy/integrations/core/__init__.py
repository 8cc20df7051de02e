"""Parts that the adapters of all trainers share. They need torch and the library, no trainer."""
