"""The routes of OpenAI's API: requests, responses, and what turns one into the other."""
