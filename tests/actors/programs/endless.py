"""An agent that asks the same again and again, in ever longer conversations."""

import openai

client, messages = openai.OpenAI(max_retries=0), []
while True:
    messages.append({"role": "user", "content": "1*1="})
    answer = client.chat.completions.create(model="policy", messages=messages)
    messages.append({"role": "assistant", "content": answer.choices[0].message.content})
