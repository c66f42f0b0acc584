"""Routes with the names, fields and answers of SGLang, for trainers that steer it. Enabled by `enable_sglang_api`."""
