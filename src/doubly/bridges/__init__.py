"""Adapters to optional libraries; each library is imported only when it is used."""
