"""Files of requests that are answered without a server, in the format of OpenAI's batches (`eagleray run-batch`)."""
