/* SPDX-License-Identifier: Apache-2.0 */
/* Orders of stores that the simulation meets too seldom, looked at behind each store. */
#include "state_fixture.h"

static void (*look)(struct world *w);
static struct world *looked_at;
static uint32_t looks;

void iswi_crash_point(void)
{
	void (*now)(struct world * w) = look;

	if (!now)
		return;
	look = NULL; /* not at what looking itself stores */
	looks++;
	now(looked_at);
	look = now;
}

void iswi_nonce_point(const unsigned char *salt, uint64_t nonce)
{
	(void)salt;
	(void)nonce;
}

static void begin(struct world *w, void (*at_each_store)(struct world *w))
{
	looks = 0;
	looked_at = w;
	look = at_each_store;
}

static void end(uint32_t at_least)
{
	look = NULL;
	CHECK(looks >= at_least);
}

static void record_is_old_or_new(struct world *w)
{
	struct world *s = successor(w);
	char record[ISW_RECORD_BYTES_MAX];
	int bytes = isw_remote_record(s->e, 0, record);

	CHECK((bytes == 5 && !memcmp(record, "older", 5)) ||
	      (bytes == 6 && !memcmp(record, "newest", 6)));
}

WORLD_TEST(a_record_is_old_or_new_behind_each_store, world_mapped(0))
{
	for (uint32_t i = 0; i < 2; i++) { /* both copies */
		CHECK_EQ(isw_remote_record_set(w->e, 0, "older", 5), 0);
		begin(w, record_is_old_or_new);
		CHECK_EQ(isw_remote_record_set(w->e, 0, "newest", 6), 0);
		end(3);
		CHECK_EQ(isw_remote_record_set(w->e, 0, "another", 7), 0);
	}
}

static void page_is_lost_or_valid(struct world *w)
{
	CHECK(is_remote_valid(w, 1) || is_backup_current(w, 1));
}

/* A copy of it arrives when the source has been given up. Never may it be zeros. */
WORLD_TEST(a_lost_page_that_arrives_is_never_zeros, world_holding(ISW_ENGINE_NO_BACKUP, 1, 1, 10))
{
	uint64_t source = slab_of(w, 0).generation;

	CHECK_EQ(remote_new(w), 1);
	CHECK_EQ(isw_slab_migrate(w->e, 0, 1, 0, ++w->generations), 0);
	CHECK(isw_slab_pull(w->e, 0, w->generations, 1) >= 0);
	REPLY(w, 0, 0);
	CHECK_EQ(sent_for(w, 1, 1, ISWI_XFER_WRITE), 1);
	begin(w, page_is_lost_or_valid);
	CHECK_EQ(isw_slab_unmap(w->e, 0, 0, source), 0);
	CHECK(!is_remote_valid(w, 1));
	REPLY(w, 1, 0);
	end(3);
	CHECK(is_remote_valid(w, 1) && !is_backup_current(w, 1));
	CHECK_EQ(read_settled(w, 1), 10);
}

/* What a successor reads, with and without its donor. */
static int64_t value_behind(struct world *w)
{
	struct world *s = successor(w);
	int64_t value = read_settled(s, 1);

	bring_back(s, 0);
	settle(s);
	CHECK_EQ(read_settled(s, 1), value);
	CHECK_EQ(stats_of(s).crc_errors_remote + stats_of(s).crc_errors_backup, 0);
	return value;
}

static void page_is_old_or_new(struct world *w)
{
	int64_t value = value_behind(w);

	CHECK(value == 10 || value == 20);
}

static void page_is_new(struct world *w)
{
	CHECK_EQ(value_behind(w), 20);
}

/* A page's whole way, with each kind of end, in both orders. */
WORLD_CASES(a_write_is_old_until_answered_and_then_new, 2, order, world_holding(0, 1, 1, 10))
{
	uint32_t id;

	begin(w, page_is_old_or_new);
	id = put(w, 1, 1, 20);
	end(4);
	begin(w, page_is_new);
	for (uint32_t i = 0; i < 2; i++) {
		if (i == order)
			REPLY(w, 0, 0);
		else
			DISK_WRITE(w);
		CHECK_EQ(w->error[id], 0);
	}
	end(2);
}
