-- A year's use of one installation, in an empty, migrated database: seeded, so the same each time.
-- Parameters: records, decisions, instances, hours (the records' span, ending now). Read by console_data.py.
SELECT setseed(0.5);
SELECT request_record_partition((now() AT TIME ZONE 'utc')::date - day) FROM generate_series(0, 2) day;

-- Configuration: who sends what to which models, on which hosts.
INSERT INTO served_model (name, aliases, context_tokens, chars_per_token, version, created_at, updated_at)
SELECT 'model-' || n, '[]', 8192, 4.0, 1, now(), now() FROM generate_series(0, 1) n;
INSERT INTO tenant (name, title, rpm, tpm, state, version, created_at, updated_at)
SELECT 'tenant-' || lpad(n::text, 2, '0'), 'Tenant ' || n, 6000, 2000000, 'active', 1, now(), now()
FROM generate_series(0, 19) n;
INSERT INTO api_key (tenant_id, name, prefix, sha256, scopes, created_at)
SELECT t.id, 'key ' || n, left('sk-' || md5(t.id || '/' || n), 11), md5(t.name || n) || md5(n || t.name), '["inference"]', now()
FROM tenant t, generate_series(1, 5) n;
INSERT INTO slo_class (name, title, ttft_s, tpot_s, waiting_time_s, target, value, may_defer, version, created_at, updated_at)
SELECT name, '', ttft, tpot, 5.0, 0.95, 1.0, false, 1, now(), now()
FROM (VALUES ('interactive', 0.5, 0.05), ('standard', 1.0, 0.1), ('batch', 60.0, 1.0), ('analytics', 20.0, 0.5)) c(name, ttft, tpot);
INSERT INTO priority_mapping (levels, "window", window_age_s, contention, version, created_at, updated_at)
SELECT jsonb_agg(jsonb_build_object('ttft_s', t, 'ttft_min_s', 0.75 * t, 'ttft_max_s', 1.25 * t, 'tpot_s', t / 10,
  'tpot_min_s', 0.075 * t, 'tpot_max_s', 0.125 * t) ORDER BY t), 1000, 300, 'relax_to_next_higher', 1, now(), now()
FROM (VALUES (0.5), (1.0), (2.0), (20.0)) levels(t);
INSERT INTO host (name, zone, labels, version, created_at, updated_at)
SELECT 'host-' || lpad(n::text, 2, '0'), 'zone-' || n %% 3, '{}', 1, now(), now() FROM generate_series(0, 24) n;
INSERT INTO device (host_id, index, kind, memory_bytes, version, created_at, updated_at)
SELECT h.id, n, 'a100', 80::bigint << 30, 1, now(), now() FROM host h, generate_series(0, 7) n;
INSERT INTO link (source_id, target_id, medium, bandwidth_bytes_s, latency_s, state, version, created_at, updated_at)
SELECT a.id, b.id, 'rdma', 12.5e9, 5e-6, 'up', 1, now(), now() FROM host a JOIN host b ON b.id = a.id + 1;
INSERT INTO latency_profile (model_id, device_kind, tp, role, coefficients, fit_errors, samples, source, fitted_at, active)
SELECT id, 'a100', 1, 'collocated',
  '{"prefill_a": 0.01, "prefill_b": 2e-5, "prefill_c": 1e-9, "decode_a": 0.01, "decode_b": 1e-8, "decode_c": 1e-4}',
  '{"prefill": 0.04}', 500, 'benchmark', now(), true FROM served_model;
INSERT INTO scaling_policy (model_id, role, min_instances, max_instances, warm, sleep_level, upper, lower, sustain_s, cooldown_s,
  interval_s, enabled, version, created_at, updated_at)
SELECT id, 'collocated', 2, 200, 0, 0, 0.8, 0.3, 15, 10, 1, true, 1, now(), now() FROM served_model;
INSERT INTO scaling_sample (policy_id, at, load, ready, starting, draining, mind, low_for_s, cooldown_left_s)
SELECT p.id, now() - n * interval '5 s', 0.5 + 0.4 * sin(n / 40.0), 100, 0, 0, 'steady', 0, 0
FROM scaling_policy p, generate_series(0, 17280) n;

-- Instances, the devices they hold, what they cost.
INSERT INTO instance (id, model_id, host_id, backend, provisioner, url, role, device_kind, tp, max_num_seqs, unit_cost, spec,
  desired_state, observed_state, weights, sleep_level, generation, observed_generation, desired_at, observed_at, ready_at, error, version,
  created_at, updated_at)
SELECT 'engine-' || lpad(n::text, 3, '0'), m[1 + n %% 2], h[1 + n %% 25], 'vllm', 'static',
  'http://10.0.' || n / 250 || '.' || n %% 250 || ':8000', 'collocated', 'a100', 1, 64, 1.0, '{}', 'running',
  CASE WHEN n %% 40 = 7 THEN 'unreachable' WHEN n %% 25 = 3 THEN 'starting' ELSE 'ready' END, 'present', 0, 1, 1, now() - interval '2 days',
  now(), now() - interval '2 days', '', 1, now() - interval '2 days', now()
FROM generate_series(0, %(instances)s - 1) n, (SELECT array_agg(id ORDER BY id) m FROM served_model) a, (SELECT array_agg(id ORDER BY id) h FROM host) b;
INSERT INTO instance_device (instance_id, device_id, held_from)
SELECT i.id, d.id, now() FROM (SELECT id, row_number() OVER (ORDER BY id) k FROM instance) i
JOIN (SELECT id, row_number() OVER (ORDER BY index, host_id) k FROM device) d USING (k);
INSERT INTO instance_interval (instance_id, role, unit_cost, started_at)
SELECT id, role, 1.0, now() - interval '2 days' FROM instance;

-- Finished requests, newest first.
INSERT INTO request_record
SELECT 'req-' || md5(n::text), at, 'tenant-' || lpad(tenant::text, 2, '0'), class, 'model-' || tenant %% 2, priority,
  CASE WHEN outcome = 'refused' THEN '' ELSE 'engine-' || lpad((n %% %(instances)s)::text, 3, '0') END, outcome,
  CASE WHEN outcome = 'refused' THEN 'slo_infeasible' ELSE '' END, CASE WHEN outcome = 'refused' THEN 429 ELSE 200 END,
  true, 'tokens', 64 + n %% 900, 20 + n %% 200, 0.5, 0.05, NULL, 5.0, CASE WHEN outcome = 'ok' THEN queue END,
  CASE WHEN outcome = 'ok' THEN queue + 0.1 + luck * 0.3 END, CASE WHEN outcome = 'ok' THEN 0.02 + luck * 0.02 END,
  CASE WHEN outcome = 'ok' THEN queue + 1 + luck * 5 ELSE 0.001 END, met, met, true, met, CASE WHEN met THEN 20 + n %% 200 ELSE 0 END,
  1, CASE WHEN n %% 40 = 0 THEN 'workflow-' || n / 400 ELSE '' END, '', decisions::jsonb, CASE WHEN outcome = 'ok' THEN '[0.2, 0.25, 0.35, 0.55, 1.1]'::jsonb ELSE '[]'::jsonb END
FROM (
  SELECT n, luck, queue, tenant, class, priority, outcome, outcome = 'ok' AND luck < 0.94 AS met,
    now() - (n::float8 / %(records)s) * %(hours)s * interval '1 hour' AS at,
    CASE WHEN priority IS NULL THEN '[{"kind": "slo", "reason": "class", "at": 0.0}' ELSE '[{"kind": "slo", "reason": "priority", '
    || '"at": 0.0, "figures": {"history": "history", "reference_ttft_s": 0.6, "queue_correction_s": 0.05}}' END || ', {"kind": "dispatch", "reason": "fits_budget", "at": 0.01, '
    || '"figures": {"slack_s": 0.4, "queued": 3}, "rejected": {"engine-001": "3 outstanding, 0 tokens waiting"}}]' AS decisions
  FROM (
    SELECT n, random() AS luck, random() * 0.2 AS queue, (n * 7919 %% 20) AS tenant,
      (ARRAY['interactive', 'standard', 'batch', 'analytics', 'priority-' || n %% 4])[1 + (n * 104729 %% 5)::int] AS class,
      CASE WHEN n * 104729 %% 5 = 4 THEN n %% 4 END AS priority,
      CASE WHEN n %% 50 = 0 THEN 'refused' ELSE 'ok' END AS outcome
    FROM generate_series(1, %(records)s::bigint) n
  ) a
) b;

-- Their roll-up by minute.
INSERT INTO attainment_minute (minute, tenant, slo_class, model, finished, attained, ttft_met, tpot_met, refused, expired, failed,
  cancelled, prompt_tokens, output_tokens, goodput_tokens, ttft_histogram, tpot_histogram, e2e_histogram)
SELECT date_trunc('minute', arrived_at), tenant, slo_class, model, count(*), count(*) FILTER (WHERE attained),
  count(*) FILTER (WHERE ttft_met), count(*) FILTER (WHERE tpot_met), count(*) FILTER (WHERE outcome = 'refused'), 0, 0, 0,
  sum(prompt_tokens), sum(output_tokens), sum(goodput_tokens), array_fill(count(*)::int, ARRAY[34]),
  array_fill(count(*)::int, ARRAY[34]), array_fill(count(*)::int, ARRAY[34])
FROM request_record GROUP BY 1, 2, 3, 4;

INSERT INTO goodput_minute (minute, tenant, slo_class, type, finished, in_time, cancelled, tokens, goodput_tokens)
SELECT date_trunc('minute', arrived_at), tenant, slo_class, CASE WHEN target_deadline_s IS NULL THEN 'latency' ELSE 'deadline' END,
  count(*), count(*) FILTER (WHERE attained), 0, sum(output_tokens), sum(goodput_tokens)
FROM request_record WHERE workflow = '' GROUP BY 1, 2, 3, 4;

-- Decisions of the last thirty days: the scaler's, and one in ten a change by a person.
INSERT INTO decision (at, actor_type, actor, kind, subject_type, subject, reason, inputs, outcome, rejected, request_id)
SELECT now() - (n::float8 / %(decisions)s) * interval '30 days',
  CASE WHEN n %% 10 = 0 THEN 'person' ELSE 'job' END, CASE WHEN n %% 10 = 0 THEN 'operator-' || n %% 7 ELSE 'scaler' END,
  CASE WHEN n %% 1000 = 500 THEN 'scaling_policy_updated' WHEN n %% 1000 = 250 THEN 'priority_mapping_updated'
    WHEN n %% 10 = 0 THEN 'slo_class_updated' WHEN n %% 3 = 0 THEN 'scale_out' ELSE 'scale_hold' END,
  CASE WHEN n %% 1000 = 250 THEN 'priority_mapping' WHEN n %% 10 = 0 AND n %% 1000 <> 500 THEN 'slo_class' ELSE 'scaling_policy' END,
  CASE WHEN n %% 1000 = 250 THEN 'priorities of all tenants' WHEN n %% 10 = 0 AND n %% 1000 <> 500 THEN 'interactive'
    ELSE 'model-' || n %% 2 || '/collocated' END,
  CASE WHEN n %% 10 = 0 THEN 'person_updated' ELSE 'load_above_upper' END,
  CASE WHEN n %% 1000 = 500 THEN '{"before": {"upper": 0.8, "lower": 0.3}, "after": {"upper": 0.9, "lower": 0.3}}'::jsonb
    WHEN n %% 1000 = 250 THEN '{"before": {"window": 1000}, "after": {"window": 500}}'
    WHEN n %% 10 = 0 THEN '{"before": {"ttft_s": 0.5, "tpot_s": 0.05}, "after": {"ttft_s": 0.7, "tpot_s": 0.05}}'
    ELSE '{"load": 1.2, "upper": 0.8, "ready": 3, "arrival_rate": 14.2, "utilisation": 0.97}' END,
  CASE WHEN n %% 1000 = 500 THEN jsonb_build_object('id', (SELECT min(id) FROM scaling_policy), 'version', 1)
    WHEN n %% 1000 = 250 THEN jsonb_build_object('id', (SELECT min(id) FROM priority_mapping), 'version', 1)
    WHEN n %% 10 = 0 THEN jsonb_build_object('id', (SELECT min(id) FROM slo_class WHERE name = 'interactive'), 'version', 1)
    ELSE '{}' END, '{}', ''
FROM generate_series(1, %(decisions)s) n;
