/* SPDX-License-Identifier: Apache-2.0 */
/* How soon a donor, or the backup, answers a read, and which of two is the quicker. */
#include "engine/state/speed.h"

#define STEP    4u /* an expectation moves by one part in this many */
#define OUTLIER 2u
/* The backup is the quicker one when it takes less than MARGIN_LESS / MARGIN of the donor's time.
 */
#define MARGIN      4u
#define MARGIN_LESS 3u

static uint64_t get(const atomic_uint_fast64_t *ns)
{
	return atomic_load_explicit(ns, memory_order_relaxed);
}

static void set(atomic_uint_fast64_t *ns, uint64_t value)
{
	atomic_store_explicit(ns, value, memory_order_relaxed);
}

/* pages: at least one. */
static uint8_t load_of(uint32_t pages)
{
	uint32_t load = pages > 1 ? 32u - (uint32_t)__builtin_clz(pages - 1) : 0;

	return (uint8_t)ISWI_MIN(load, ISWI_SPEED_LOADS - 1);
}

static uint8_t load_with(const struct iswi_speed *s, uint32_t pages)
{
	return load_of(atomic_load_explicit(&s->pages, memory_order_relaxed) + pages);
}

void iswi_speed_forget(struct iswi_speed *s)
{
	for (uint32_t i = 0; i < ISWI_SPEED_LOADS; i++)
		set(&s->took_ns[i], 0);
	set(&s->measure_ns, 0);
}

uint8_t iswi_speed_begin(struct iswi_speed *s, uint32_t pages)
{
	return load_of(atomic_fetch_add_explicit(&s->pages, pages, memory_order_relaxed) + pages);
}

void iswi_speed_end(struct iswi_speed *s, uint32_t pages)
{
	atomic_fetch_sub_explicit(&s->pages, pages, memory_order_relaxed);
}

void iswi_speed_took(struct iswi_speed *s, uint8_t load, uint64_t took_ns)
{
	uint64_t expected = get(&s->took_ns[load]);

	if (!expected)
		expected = took_ns;
	else if (took_ns < expected)
		expected -= (expected - took_ns) / STEP;
	else
		expected += (ISWI_MIN(took_ns, expected * OUTLIER) - expected) / STEP;
	expected = ISWI_MAX(expected, STEP); /* from less it could not rise */
	set(&s->took_ns[load], expected);
	/*
	 * More pages never take less time, and twice the pages take at most twice the time: so what
	 * is known of one load tells of the others.
	 */
	for (uint32_t i = 0; i < ISWI_SPEED_LOADS; i++) {
		uint64_t other = get(&s->took_ns[i]);

		if (i < load)
			set(&s->took_ns[i], ISWI_MIN(other, expected));
		else if (other)
			set(&s->took_ns[i],
			    ISWI_MIN(ISWI_MAX(other, expected), expected << (i - load)));
	}
}

bool iswi_speed_is_late(const struct iswi_speed *s, uint8_t load, uint64_t for_ns)
{
	return for_ns > get(&s->took_ns[load]);
}

void iswi_speed_unanswered(struct iswi_speed *s, uint8_t load, uint64_t for_ns)
{
	if (iswi_speed_is_late(s, load, for_ns))
		iswi_speed_took(s, load, for_ns);
}

void iswi_speed_failed(struct iswi_speed *s, uint64_t took_ns)
{
	took_ns = ISWI_MAX(took_ns, ISWI_SPEED_FAILED_NS);
	for (uint32_t i = 0; i < ISWI_SPEED_LOADS; i++)
		set(&s->took_ns[i], ISWI_MAX(get(&s->took_ns[i]), took_ns));
}

uint64_t iswi_speed_expected_ns(const struct iswi_speed *s, uint32_t pages)
{
	uint8_t load = load_with(s, pages);
	uint64_t ns = 0;

	/* Twice the pages take at most twice the time, and half of them no more than all. */
	for (uint32_t i = load + 1u; i-- && !ns;)
		ns = get(&s->took_ns[i]) << (load - i);
	for (uint32_t i = load + 1u; i < ISWI_SPEED_LOADS && !ns; i++)
		ns = get(&s->took_ns[i]);
	return ns;
}

/* What a read at that load takes at least: as long as at a smaller one. */
static uint64_t at_least_ns(const struct iswi_speed *s, uint32_t load)
{
	uint64_t ns = 0;

	for (uint32_t i = load + 1; i-- && !ns;)
		ns = get(&s->took_ns[i]);
	return ns;
}

enum iswi_speed_choice iswi_speed_choose(const struct iswi_speed *donor,
					 const struct iswi_speed *backup, uint32_t pages,
					 uint64_t now_ns)
{
	uint64_t donor_ns = at_least_ns(donor, load_with(donor, pages));
	uint64_t backup_ns = iswi_speed_expected_ns(backup, pages);

	if (donor_ns && backup_ns && backup_ns * MARGIN < donor_ns * MARGIN_LESS)
		return now_ns >= get(&donor->measure_ns) ? ISWI_SPEED_DONOR_MEASURED
							 : ISWI_SPEED_BACKUP;
	return now_ns >= get(&backup->measure_ns) ? ISWI_SPEED_BACKUP_MEASURED : ISWI_SPEED_DONOR;
}

bool iswi_speed_measure(struct iswi_speed *s, uint64_t now_ns)
{
	uint_fast64_t due_ns = get(&s->measure_ns);

	return now_ns >= due_ns && atomic_compare_exchange_strong_explicit(
					   &s->measure_ns, &due_ns, ISWI_SPEED_UNDER_WAY,
					   memory_order_relaxed, memory_order_relaxed);
}

void iswi_speed_measured(struct iswi_speed *s, uint64_t began_ns, uint64_t now_ns)
{
	uint64_t took_ns = now_ns - began_ns;

	set(&s->measure_ns, now_ns + (took_ns < ISWI_SPEED_PAUSE_NS / ISWI_SPEED_MEASURE
					      ? took_ns * ISWI_SPEED_MEASURE
					      : ISWI_SPEED_PAUSE_NS));
}
