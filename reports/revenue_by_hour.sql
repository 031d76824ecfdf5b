-- Revenue by hour and currency, of the orders that landed in the window.
-- feed: orders
SELECT date_trunc('HOUR', ts) AS hour, currency, count(*) AS orders, sum(amount) AS revenue
FROM orders
WHERE NOT kafka_tombstone
GROUP BY ALL
ORDER BY hour, revenue DESC
