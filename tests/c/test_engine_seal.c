/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sealed pages: what leaves the engine is not the page, and what comes back is the page's newest
 * version or nothing. Attacks here have what a donor or somebody on the path has: every sealed
 * byte, old and new.
 */
#define OWN_MAIN
#include <fcntl.h>
#include <unistd.h>

#include "migrate_fixture.h"
#include "state_fixture.h"

#define MARK  0x1b4c5d6e7f8091a2u /* pages hold it all over */
#define OTHER (MARK + 1)

static char path[4096];

static unsigned char *on_donor(const struct world *w, uint32_t remote, uint64_t page)
{
	return iswi_sim_of(w->e)->donors[remote]->memory + page * ISW_PAGE_BYTES;
}

static unsigned char *on_disk(const struct world *w, uint64_t page)
{
	return iswi_sim_of(w->e)->disk + page * ISW_PAGE_BYTES;
}

static bool holds_mark(const void *memory, size_t bytes)
{
	const uint64_t mark = MARK;

	return memmem(memory, bytes, &mark, sizeof(mark));
}

/* Slab 0 is on donor 0; page 1 holds MARK, there and on the backup if there is one. */
static struct world *world_sealed(uint32_t flags)
{
	return world_holding(flags | ISW_ENGINE_SEAL, 1, 1, MARK);
}

/* ------------------------------------------------------------------ where bytes are sealed */

static void nothing_holds_mark(const struct world *w)
{
	CHECK(!holds_mark(w->e->arena, w->e->arena_bytes)); /* staging, tables, state file */
	CHECK(!holds_mark(on_donor(w, 0, 0), SLABS * SLAB_PAGES * ISW_PAGE_BYTES));
	CHECK(!holds_mark(on_disk(w, 0), PAGES * ISW_PAGE_BYTES));
}

WORLD_TEST(a_page_is_nowhere_in_clear, world_mapped(ISW_ENGINE_SEAL))
{
	put(w, 1, 1, MARK);
	CHECK_EQ(stats_of(w).staging_pages_used, 1);
	nothing_holds_mark(w);
	REPLY(w, 0, 0);
	nothing_holds_mark(w);
	settle(w);
	nothing_holds_mark(w);
	CHECK(!memcmp(on_donor(w, 0, 1), on_disk(w, 1), ISW_PAGE_BYTES));
	CHECK_EQ(read_settled(w, 1), MARK);
	nothing_holds_mark(w);
}

/* The test above can fail. */
WORLD_TEST(without_a_seal_it_is_everywhere, world_holding(0, 1, 1, MARK))
{
	CHECK(holds_mark(w->e->arena, w->e->arena_bytes));
	CHECK(holds_mark(on_donor(w, 0, 1), ISW_PAGE_BYTES));
	CHECK(holds_mark(on_disk(w, 1), ISW_PAGE_BYTES));
}

WORLD_TEST(every_source_gives_the_page, world_mapped(ISW_ENGINE_SEAL))
{
	put(w, 1, 1, MARK);
	READ_FROM(w, staging, 1, MARK);
	READ_FROM(w, remote, 1, MARK);
	BREAK(w, 0);
	READ_FROM(w, backup, 1, MARK);
	READ_FROM(w, zero, 2, 0);
}

WORLD_TEST(equal_pages_are_sealed_differently, world_mapped(ISW_ENGINE_SEAL))
{
	unsigned char before[ISW_PAGE_BYTES];

	write_settled(w, 1, 1, MARK);
	memcpy(before, on_disk(w, 1), sizeof(before));
	write_settled(w, 2, 1, MARK);
	CHECK(memcmp(before, on_disk(w, 2), sizeof(before)));
	write_settled(w, 1, 1, MARK);
	CHECK(memcmp(before, on_disk(w, 1), sizeof(before)));
}

WORLD_TEST(a_request_of_many_pages_from_many_places, world_mapped(ISW_ENGINE_SEAL))
{
	uint32_t id;

	write_settled(w, 0, 6, 100);
	put(w, 2, 2, 200);
	trim(w, 5, 1);
	id = get(w, 0, 6);
	settle(w);
	CHECK_EQ(w->error[id], 0);
	for (uint32_t i = 0; i < 6; i++)
		CHECK_EQ(w->got[id][i], i == 2 || i == 3 ? 198 + i : i == 5 ? 0 : 100 + i);
}

/* --------------------------------------------------------------------------- attacks */

enum attack { FLIP, SWAP, ROLL_BACK, ZERO, OTHER_DEVICE, ATTACKS };

/* What the donor's, or the disk's, copy of page 1 becomes. */
static void attack(struct world *w, enum attack how, unsigned char *(*place)(struct world *))
{
	unsigned char old[ISW_PAGE_BYTES];
	struct world *other;

	memcpy(old, place(w), sizeof(old));
	write_settled(w, 1, 1, OTHER);
	write_settled(w, 2, 1, MARK + 2);
	switch (how) {
	case FLIP:
		place(w)[1234] ^= 4;
		break;
	case SWAP:
		memcpy(place(w), place(w) + ISW_PAGE_BYTES, sizeof(old));
		break;
	case ROLL_BACK:
		memcpy(place(w), old, sizeof(old));
		break;
	case ZERO:
		memset(place(w), 0, sizeof(old));
		break;
	default: /* of the same key even, and with the same count of its nonce */
		other = world_sealed(0);
		write_settled(other, 1, 1, OTHER);
		memcpy(place(w), place(other), sizeof(old));
		world_end(other);
	}
}

static unsigned char *donors_copy(struct world *w)
{
	return on_donor(w, 0, 1);
}

static unsigned char *disks_copy(struct world *w)
{
	return on_disk(w, 1);
}

WORLD_CASES(a_donors_forgery_is_read_from_the_backup, ATTACKS, n, world_sealed(0))
{
	attack(w, (enum attack)n, donors_copy);
	READ_FROM(w, backup, 1, OTHER);
	CHECK_EQ(stats_of(w).crc_errors_remote, 1);
	CHECK_EQ(w->events[ISW_EVENT_BAD_PAGE], 1);
	CHECK(!is_remote_valid(w, 1));
}

WORLD_CASES(a_forgery_of_the_only_copy_is_an_error, ATTACKS, n, world_sealed(ISW_ENGINE_NO_BACKUP))
{
	attack(w, (enum attack)n, donors_copy);
	CHECK_EQ(read_settled(w, 1), -EIO);
	CHECK_EQ(read_settled(w, 1), -EIO); /* never zeros, and never what it was */
	CHECK(is_remote_valid(w, 1));
	CHECK_EQ(w->events[ISW_EVENT_BAD_PAGE], 2);
}

WORLD_CASES(a_forgery_on_the_backup_is_found_out, ATTACKS, n, world_sealed(0))
{
	attack(w, (enum attack)n, disks_copy);
	READ_FROM(w, remote, 1, OTHER);
	BREAK(w, 0);
	CHECK_EQ(read_settled(w, 1), -EIO);
	CHECK_EQ(stats_of(w).crc_errors_backup, 1);
}

/* Bytes and seal together are of no use in another page's place: its number is sealed as well. */
WORLD_TEST(a_seal_is_one_pages_alone, world_sealed(0))
{
	unsigned char out[ISW_PAGE_BYTES];
	struct iswi_seal seal;

	iswi_seal_of(w->e, 1, &seal);
	CHECK(iswi_seal_open(w->e, 1, &seal, on_disk(w, 1), out));
	CHECK(!iswi_seal_open(w->e, 2, &seal, on_disk(w, 1), out));
}

/* What a request gets of bytes that do not open is zeros, not the forger's choice. */
WORLD_TEST(a_request_that_fails_holds_no_forgery, world_sealed(ISW_ENGINE_NO_BACKUP))
{
	uint32_t id;

	on_donor(w, 0, 1)[99] ^= 1;
	id = get(w, 1, 1);
	settle(w);
	CHECK_EQ(w->error[id], -EIO);
	CHECK_EQ(w->got[id][0], 0);
}

/* ------------------------------------------------------------------------------- races */

/* The donor's answer is older than the write that was made meanwhile. */
WORLD_TEST(a_write_that_passes_a_read_wins, world_sealed(0))
{
	uint32_t id = get(w, 1, 1);

	APPLY(w, 0, 0);
	put(w, 1, 1, OTHER);
	REPLY(w, 0, 0);
	READ_ENDS(w, id, OTHER);
	CHECK_EQ(stats_of(w).crc_errors_remote, 0);
}

static struct world *world_hedging(void)
{
	struct world *w = WORLD_BUT(config.flags = ISW_ENGINE_SEAL; config.staging_pages = 64;
				    config.seal_key_fd = test_key_fd(); config.hedge_us_min = 5000);

	CHECK_EQ(remote_new(w), 0);
	map(w, 0, 0);
	write_settled(w, 1, 2, MARK);
	return w;
}

WORLD_CASES(either_leg_of_a_hedged_read_opens, 2, donor_first, world_hedging())
{
	uint32_t id = get(w, 1, 2);

	SLOW(w, 0, 0);
	if (donor_first)
		REPLY(w, 0, 0);
	else
		DISK_READ(w);
	CHECK_EQ(w->error[id], 0);
	CHECK_EQ(w->got[id][0], MARK);
	CHECK_EQ(w->got[id][1], MARK + 1);
	CHECK(!holds_mark(w->e->staging, 64 * ISW_PAGE_BYTES));
}

WORLD_CASES(a_bad_leg_leaves_it_to_the_other, 2, bad_donor, world_hedging())
{
	uint32_t id = get(w, 1, 2);

	SLOW(w, 0, 0);
	(bad_donor ? on_donor(w, 0, 2) : on_disk(w, 2))[7] ^= 1;
	if (bad_donor)
		REPLY(w, 0, 0);
	else
		DISK_READ(w);
	CHECK_EQ(w->error[id], PENDING);
	settle(w);
	CHECK_EQ(w->error[id], 0);
	CHECK_EQ(w->got[id][1], MARK + 1);
}

WORLD_TEST(two_bad_legs_are_an_error, world_hedging())
{
	uint32_t id = get(w, 1, 2);

	SLOW(w, 0, 0);
	on_donor(w, 0, 2)[7] ^= 1;
	on_disk(w, 2)[7] ^= 1;
	settle(w);
	CHECK_EQ(w->error[id], -EIO);
	CHECK(w->got[id][1] != MARK + 1);
}

/* ------------------------------------------------------------------------------ copies */

WORLD_TEST(a_migration_carries_what_was_sealed, world_holding(ISW_ENGINE_SEAL, 1, 2, MARK))
{
	CHECK_EQ(remote_new(w), TARGET);
	migrate(w, 0, TARGET);
	pull_all(w);
	CHECK_EQ(stats_of(w).pages_migrated, 2);
	CHECK(!memcmp(on_donor(w, 0, 1), on_donor(w, TARGET, 1), 2 * ISW_PAGE_BYTES));
	READ_FROM(w, remote, 1, MARK);
}

WORLD_TEST(a_refill_carries_what_was_sealed, world_sealed(0))
{
	uint64_t nonce = iswi_seal_number(w->e, 1);

	unmap(w);
	map(w, 0, 0);
	memset(on_donor(w, 0, 1), 0, ISW_PAGE_BYTES);
	fill(w, 0, 8, 1);
	settle(w);
	CHECK(is_remote_valid(w, 1));
	CHECK(!memcmp(on_donor(w, 0, 1), on_disk(w, 1), ISW_PAGE_BYTES));
	CHECK_EQ(iswi_seal_number(w->e, 1), nonce);
	READ_FROM(w, remote, 1, MARK);
}

WORLD_TEST(a_forgery_is_not_copied, world_sealed(0))
{
	unmap(w);
	map(w, 0, 0);
	on_disk(w, 1)[5] ^= 1;
	fill(w, 0, 8, 1);
	settle(w);
	CHECK(!is_remote_valid(w, 1));
	CHECK_EQ(stats_of(w).pages_copy_dropped, 1);
	CHECK_EQ(stats_of(w).crc_errors_backup, 1);
}

/* ---------------------------------------------------------------------- nonces and keys */

static bool same_salt(const struct world *a, const struct world *b, uint32_t number)
{
	return !memcmp(a->e->arena->epochs[number].salt, b->e->arena->epochs[number].salt,
		       ISWI_SALT_BYTES);
}

WORLD_TEST(a_successor_goes_on_counting, world_kept(ISW_ENGINE_SEAL, new_file()))
{
	struct world *s;
	uint64_t next;

	CHECK_EQ(remote_new(w), 0);
	map(w, 0, 0);
	put(w, 1, 1, MARK);
	next = iswi_kept64(&w->e->arena->next_nonce);
	s = successor(w);
	CHECK(same_salt(w, s, 0));
	CHECK_EQ(iswi_kept64(&s->e->arena->next_nonce), next);
	CHECK_EQ(read_settled(s, 1), MARK);
	put(s, 2, 1, OTHER);
	CHECK_EQ(iswi_seal_number(s->e, 2), next);
	settle(s);
	bring_back(s, 0);
	CHECK_EQ(read_settled(s, 1), MARK);
}

WORLD_TEST(a_state_file_with_no_key_is_refused, world_kept(ISW_ENGINE_SEAL, new_file()))
{
	int fd = copied_file(w);
	struct world *s;
	struct isw_engine_config config = world_config(ISW_ENGINE_STANDBY);
	struct isw_error error = {0};
	isw_engine *e;

	config.state_fd = fd;
	CHECK_EQ(isw_sim_create(&config, &e, &error), -EINVAL);
	CHECK(strstr(error.text, "keys"));
	s = world_standby(ISW_ENGINE_SEAL, fd);
	atomic_store(&s->e->arena->next_nonce, ~0ull);
	CHECK_EQ(isw_sim_take_over(s->e, w->e, 0, &error), -EBADMSG);
	world_end(s);
	close(fd);
}

WORLD_TEST(two_devices_never_share_a_key, world_sealed(0))
{
	struct world *other = world_sealed(0);

	CHECK(!same_salt(w, other, 0));
	world_end(other);
}

WORLD_TEST(after_many_pages_there_is_another_key, world_sealed(0))
{
	CHECK_EQ(isw_engine_seal_tend(w->e), 0);
	CHECK_EQ(iswi_epoch_of(iswi_seal_number(w->e, 1)), 0);
	for (uint32_t i = 1; i < ISWI_EPOCHS - 1; i++) {
		atomic_fetch_add(&w->e->arena->next_nonce, ISWI_EPOCH_PAGES);
		CHECK_EQ(isw_engine_seal_tend(w->e), 1);
		CHECK_EQ(isw_engine_seal_tend(w->e), 0);
		write_settled(w, 2, 1, i);
		CHECK_EQ(iswi_epoch_of(iswi_seal_number(w->e, 2)), i);
		CHECK_EQ(read_settled(w, 2), i);
	}
	READ_FROM(w, remote, 1, MARK); /* by the first one */
	atomic_fetch_add(&w->e->arena->next_nonce, ISWI_EPOCH_PAGES);
	CHECK_EQ(isw_engine_seal_tend(w->e), -ENOSPC);
	write_settled(w, 2, 1, OTHER); /* the last one goes on */
	CHECK_EQ(read_settled(w, 2), OTHER);
}

TEST(no_key_no_engine)
{
	struct isw_engine_config config = world_config(ISW_ENGINE_SEAL);
	struct isw_error error = {0};
	isw_engine *e = NULL;

	config.seal_key_fd = -1;
	CHECK_EQ(isw_sim_create(&config, &e, &error), -EBADF);
	CHECK(!e && error.text[0]);
}

static void opened_done(struct iswi_req *req, int error)
{
	CHECK_EQ(error, 0);
	req->done = NULL;
}

/* What it was opened from stays sealed: others may write where it is opened to. */
static void read_opened(struct world *w)
{
	static unsigned char data[ISW_PAGE_BYTES] __attribute__((aligned(4096)));
	static unsigned char opened[ISW_PAGE_BYTES];
	struct iswi_req req = {
		.op = ISWI_READ,
		.offset = ISW_PAGE_BYTES,
		.length = ISW_PAGE_BYTES,
		.data = data,
		.opened = opened,
		.done = opened_done,
	};

	memset(opened, 0, sizeof(opened));
	iswi_engine_submit(w->e, &req);
	settle(w);
	CHECK(req.done == NULL);
	CHECK(!holds_mark(data, sizeof(data)));
	CHECK(holds_mark(opened, sizeof(opened)));
}

WORLD_TEST(a_page_comes_where_it_is_opened, world_sealed(0))
{
	read_opened(w);
	BREAK(w, 0);
	read_opened(w); /* from the disk */
	put(w, 1, 1, MARK);
	CHECK_EQ(stats_of(w).staging_pages_used, 1);
	read_opened(w);
}

/* -------------------------------------------------------------------------- saved tables */

/* The same device started again: its disk as it was left. */
static struct world *restarted(const struct world *before, int key_fd)
{
	struct world *w = WORLD_BUT(config.flags = ISW_ENGINE_SEAL; config.seal_key_fd = key_fd);

	memcpy(iswi_sim_of(w->e)->disk, iswi_sim_of(before->e)->disk, PAGES * ISW_PAGE_BYTES);
	return w;
}

WORLD_TEST(saved_tables_bring_sealed_contents_back, world_sealed(0))
{
	struct world *again, *once_more;
	uint32_t number;

	CHECK_EQ(isw_engine_save_tables(w->e, path, NULL), 0);
	again = restarted(w, test_key_fd());
	CHECK_EQ(isw_engine_load_tables(again->e, path, NULL), 0);
	CHECK_EQ(read_settled(again, 1), MARK);
	/* These tables put back a second time: what is sealed now is so with another key. */
	write_settled(again, 2, 1, OTHER);
	once_more = restarted(again, test_key_fd());
	CHECK_EQ(isw_engine_load_tables(once_more->e, path, NULL), 0);
	number = iswi_epoch_of(iswi_kept64(&once_more->e->arena->next_nonce));
	CHECK_EQ(iswi_epoch_of(iswi_kept64(&again->e->arena->next_nonce)), number);
	CHECK(!same_salt(again, once_more, number));
	CHECK(same_salt(w, once_more, 0));
	CHECK_EQ(read_settled(once_more, 1), MARK);
	world_end(again);
	world_end(once_more);
}

#define SALT_AT 32 /* after the first header */

static void saved_salt(const struct world *w, unsigned char *salt)
{
	int fd;

	CHECK_EQ(isw_engine_save_tables(w->e, path, NULL), 0);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	CHECK_EQ(pread(fd, salt, ISWI_SALT_BYTES, SALT_AT), ISWI_SALT_BYTES);
	close(fd);
}

/* Their nonces count from 0 in each file. */
WORLD_TEST(each_file_of_tables_has_a_key_of_its_own, world_sealed(0))
{
	unsigned char first[ISWI_SALT_BYTES], second[ISWI_SALT_BYTES];

	saved_salt(w, first);
	saved_salt(w, second);
	CHECK(memcmp(first, second, sizeof(first)));
}

static void refused(const struct world *before, int key_fd, int wanted)
{
	struct world *w = restarted(before, key_fd);
	struct isw_error error = {0};

	CHECK_EQ(isw_engine_load_tables(w->e, path, &error), wanted);
	CHECK(strstr(error.text, path));
	for (uint32_t page = 0; page < PAGES; page++)
		CHECK(!is_backup_current(w, page));
	write_settled(w, 3, 1, OTHER); /* a new device it can be */
	CHECK_EQ(read_settled(w, 3), OTHER);
	world_end(w);
}

WORLD_TEST(altered_tables_are_refused, world_sealed(0))
{
	struct world *plain = world_new(0);
	struct isw_error error = {0};
	int fd, other_key = -1;
	off_t bytes;

	CHECK_EQ(isw_engine_save_tables(w->e, path, NULL), 0);
	CHECK_EQ(isw_engine_load_tables(plain->e, path, NULL), -EPROTONOSUPPORT);
	CHECK_OK(isw_seal_key_make(&other_key, &error), error);
	refused(w, other_key, -EKEYREJECTED);
	close(other_key);
	fd = open(path, O_RDWR | O_CLOEXEC);
	bytes = lseek(fd, 0, SEEK_END);
	/* The first header has a checksum; nothing else can be changed by who can make one. */
	for (off_t at = 0; at < bytes; at += at < 64 ? 1 : 13) {
		unsigned char byte;

		CHECK_EQ(pread(fd, &byte, 1, at), 1);
		byte ^= 0x10;
		CHECK_EQ(pwrite(fd, &byte, 1, at), 1);
		refused(w, test_key_fd(),
			at < 32 || at >= bytes - PAGES * 24 - 4 ? -EBADMSG : -EKEYREJECTED);
		byte ^= 0x10;
		CHECK_EQ(pwrite(fd, &byte, 1, at), 1);
	}
	close(fd);
	CHECK_EQ(isw_engine_save_tables(plain->e, path, NULL), 0);
	refused(w, test_key_fd(), -EPROTONOSUPPORT);
	world_end(plain);
}

/* Of the first header: what somebody who changes the rest would make right again. */
#define SEALS_CRC_AT  16
#define HEADER_CRC_AT 20
#define HEADER_BYTES  32

static uint32_t crc_at(int fd, off_t at, size_t bytes)
{
	unsigned char *data = malloc(bytes);
	uint32_t crc;

	CHECK_EQ(pread(fd, data, bytes, at), bytes);
	crc = iswi_crc32c(data, bytes);
	free(data);
	return crc;
}

WORLD_TEST(tables_with_right_checksums_are_refused, world_sealed(0))
{
	const size_t seals_bytes = PAGES * sizeof(struct iswi_seal);
	struct iswi_seal seals[2];
	uint32_t crc = 0;
	off_t at;
	int fd;

	write_settled(w, 2, 1, OTHER);
	CHECK_EQ(isw_engine_save_tables(w->e, path, NULL), 0);
	fd = open(path, O_RDWR | O_CLOEXEC);
	at = lseek(fd, 0, SEEK_END) - (off_t)seals_bytes;
	CHECK_EQ(pread(fd, seals, sizeof(seals), at + (off_t)sizeof(seals[0])), sizeof(seals));
	CHECK_EQ(pwrite(fd, &seals[1], sizeof(seals[1]), at + (off_t)sizeof(seals[0])),
		 sizeof(seals[1]));
	crc = crc_at(fd, at, seals_bytes);
	CHECK_EQ(pwrite(fd, &crc, sizeof(crc), SEALS_CRC_AT), sizeof(crc));
	crc = 0;
	CHECK_EQ(pwrite(fd, &crc, sizeof(crc), HEADER_CRC_AT), sizeof(crc));
	crc = crc_at(fd, 0, HEADER_BYTES);
	CHECK_EQ(pwrite(fd, &crc, sizeof(crc), HEADER_CRC_AT), sizeof(crc));
	refused(w, test_key_fd(), -EKEYREJECTED);
	close(fd);
}

int main(void)
{
	const char *directory = getenv("TMPDIR");
	int fd;

	if (!test_seal_flag())
		SKIP("no cryptographic library");
	snprintf(path, sizeof(path), "%s/isw-seal-XXXXXX", directory ? directory : "/tmp");
	fd = mkstemp(path);
	CHECK(fd >= 0);
	close(fd);
	run_tests();
	unlink(path);
	return 0;
}
