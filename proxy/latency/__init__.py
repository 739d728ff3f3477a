"""The predicted speed of each pod, learned online from the requests that the proxy sends."""
