"""Call a running fleet from Python, without HTTP: same validation, same router, same policies.

Start the fleet with `make serve`, then run `.venv/bin/python examples/python_handles.py`.
"""

import ray
from ray import serve

ray.init(address="auto", log_to_driver=False)
fleet = serve.get_app_handle("tidegate")
question = {
    "model": "smollm2-135m-instruct",
    "messages": [{"role": "user", "content": "Name the capital of Italy."}],
    "max_tokens": 20,
    "temperature": 0,
}

answer = fleet.chat.remote(question).result()
print("chat:", answer["choices"][0]["message"]["content"])

print("chat_stream:", end=" ")
for chunk in fleet.options(stream=True).chat_stream.remote(question):
    print(chunk["choices"][0]["delta"].get("content") or "", end="", flush=True)
print()

completion = fleet.complete.remote({"model": question["model"], "prompt": "Water boils at", "max_tokens": 8}).result()
print("complete:", completion["choices"][0]["text"])

tokens = fleet.generate_tokens.remote([504, 3575, 282], max_tokens=8, temperature=0).result()
print("generate_tokens:", tokens)
