/* SPDX-License-Identifier: Apache-2.0 */
/* The table of who has which block: what a kill leaves, what is damaged, where blocks go. */
#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engine_real.h"
#include "frontend/far_table.h"
#include "tests.h"

#define BLOCKS      20u
#define NUMBERS     100u
#define SLAB_BLOCKS 4u
#define MIB         (1ull << 20)

/* The first slab has one block of the far range only, as the block device has the rest of it. */
static uint32_t mapped = UINT32_MAX; /* a bit for each slab of the device */

static bool is_mapped(const void *ctx, uint32_t slab)
{
	(void)ctx;
	return mapped >> slab & 1;
}

static const struct iswi_far_layout layout = {
	.blocks = BLOCKS,
	.numbers = NUMBERS,
	.offset = 2 * SLAB_BLOCKS * ISWF_BLOCK_BYTES - ISWF_BLOCK_BYTES,
	.slab_bytes = SLAB_BLOCKS * ISWF_BLOCK_BYTES,
	.is_mapped = is_mapped,
};

static int new_file(void)
{
	int fd = memfd_create("table", MFD_CLOEXEC);

	CHECK(fd >= 0);
	return fd;
}

static void open_table(struct iswi_far_table *table, int fd, bool expect_new)
{
	struct isw_error error = {0};
	bool is_new;

	CHECK_OK(iswi_far_table_open(table, fd, &layout, &is_new, &error), error);
	CHECK_EQ(is_new, expect_new);
	if (is_new)
		iswi_far_table_begin(table);
}

static void use_client(struct iswi_far_table *table, uint32_t client, uint64_t job)
{
	table->kept->clients[client].job = job;
	atomic_store(&table->kept->clients[client].used, 1);
}

static uint32_t give(struct iswi_far_table *table, uint32_t client, uint32_t number)
{
	uint32_t place = ISWI_FAR_NONE;

	CHECK_EQ(iswi_far_place_get(table, client, number, true, &place), 0);
	iswi_far_place_put(table, place);
	return place;
}

static void take_back(struct iswi_far_table *table, uint32_t client, uint32_t number)
{
	uint32_t place;

	CHECK_EQ(iswi_far_place_get(table, client, number, false, &place), 0);
	CHECK_EQ(iswi_far_place_close(table, place), 0);
	iswi_far_place_left(table, place, true);
}

/* What a predecessor that is killed there leaves is a new table, not one of another device. */
TEST(a_table_whose_making_was_cut_short_is_new)
{
	struct iswi_far_table table;
	struct isw_error error = {0};
	int fd = new_file();
	bool is_new;

	for (uint32_t i = 0; i < 3; i++) {
		CHECK_OK(iswi_far_table_open(&table, fd, &layout, &is_new, &error), error);
		CHECK(is_new);
		table.kept->blocks = BLOCKS; /* killed before the magic */
		iswi_far_table_close(&table);
	}
	open_table(&table, fd, true);
	iswi_far_table_close(&table);
	open_table(&table, fd, false);
	iswi_far_table_close(&table);
	close(fd);
}

/* Else it would be asked in a way that it does not understand, and the bytes would be lost. */
TEST(a_table_of_another_version_is_refused)
{
	struct iswi_far_table table;
	struct isw_error error = {0};
	int fd = new_file();
	bool is_new;

	open_table(&table, fd, true);
	atomic_fetch_add(&table.kept->magic, 1u << 8);
	iswi_far_table_close(&table);
	CHECK_EQ(iswi_far_table_open(&table, fd, &layout, &is_new, &error), -EINVAL);
	close(fd);
}

TEST(a_table_of_another_size_is_refused)
{
	struct iswi_far_layout other = layout;
	struct iswi_far_table table;
	struct isw_error error = {0};
	int fd = new_file();
	bool is_new;

	open_table(&table, fd, true);
	iswi_far_table_close(&table);
	other.blocks--;
	CHECK_EQ(iswi_far_table_open(&table, fd, &other, &is_new, &error), -EINVAL);
	close(fd);
}

/* Nobody gets blocks by a table that cannot be: they may be another's. */
TEST_CASES(a_damaged_table_is_refused, 4, n)
{
	static const struct {
		uint32_t owner, number;
	} wrong[] = {
		{ISWI_FAR_CLIENTS_MAX + 1, 1}, /* there is no such client */
		{3, 1},                        /* that one is not used */
		{1, NUMBERS},                  /* there is no such number */
		{1, 0},                        /* it has a block of that number */
	};
	struct iswi_far_table table;
	struct isw_error error = {0};
	int fd = new_file();
	bool is_new;

	open_table(&table, fd, true);
	use_client(&table, 0, 1);
	CHECK_EQ(give(&table, 0, 0), 0);
	table.kept->block[5].number = wrong[n].number;
	atomic_store(&table.kept->block[5].owner, wrong[n].owner);
	iswi_far_table_close(&table);
	CHECK_EQ(iswi_far_table_open(&table, fd, &layout, &is_new, &error), -EUCLEAN);
	CHECK(strstr(error.text, "damaged") != NULL);
	close(fd);
}

/* Programs reserve more addresses than there are blocks: a number has a place once it is used. */
TEST(any_number_gets_a_place_while_there_is_one)
{
	struct iswi_far_table table;
	int fd = new_file();
	uint32_t place;

	open_table(&table, fd, true);
	use_client(&table, 0, 100);
	for (uint32_t i = 0; i < BLOCKS; i++)
		give(&table, 0, NUMBERS - 1 - 4 * i);
	CHECK_EQ(iswi_far_place_get(&table, 0, 0, true, &place), -ENOSPC);
	CHECK_EQ(iswi_far_place_get(&table, 0, NUMBERS, true, &place), -EINVAL);
	take_back(&table, 0, NUMBERS - 1);
	place = give(&table, 0, 0);
	iswi_far_table_close(&table);
	open_table(&table, fd, false); /* a successor knows them */
	CHECK_EQ(give(&table, 0, 0), place);
	CHECK_EQ(iswi_far_places_used(&table), BLOCKS);
	iswi_far_table_close(&table);
	close(fd);
}

/* F24: what a job leaves behind are whole slabs. */
TEST(each_job_has_slabs_of_its_own)
{
	struct iswi_far_table table;
	int fd = new_file();

	open_table(&table, fd, true);
	use_client(&table, 0, 100);
	use_client(&table, 1, 200);
	use_client(&table, 2, 100); /* another process of the first job */
	CHECK_EQ(give(&table, 0, 0), 0);
	CHECK_EQ(give(&table, 0, 1), 1); /* the first slab has one block only */
	CHECK_EQ(give(&table, 1, 0), 5);
	CHECK_EQ(give(&table, 2, 0), 2);
	CHECK_EQ(give(&table, 1, 1), 6);
	iswi_far_table_close(&table);
	open_table(&table, fd, false); /* a successor goes on so */
	CHECK_EQ(give(&table, 0, 2), 3);
	CHECK_EQ(give(&table, 1, 2), 7);
	take_back(&table, 0, 0);
	take_back(&table, 0, 1);
	take_back(&table, 0, 2);
	CHECK_EQ(give(&table, 2, 1), 1); /* the lowest in a slab of its job's */
	take_back(&table, 2, 0);
	take_back(&table, 2, 1);
	CHECK_EQ(give(&table, 1, 3), 8);
	CHECK_EQ(give(&table, 1, 4), 0); /* then those that nobody has */
	iswi_far_table_close(&table);
	close(fd);
}

/* A slab that no donor has comes last, and a full range is told. */
TEST(blocks_go_to_mapped_slabs_first)
{
	struct iswi_far_table table;
	int fd = new_file();
	uint32_t place;

	open_table(&table, fd, true);
	use_client(&table, 0, 100);
	use_client(&table, 1, 200);
	mapped = 1u << 4; /* places 9 to 12 */
	for (uint32_t i = 0; i < SLAB_BLOCKS; i++)
		CHECK_EQ(give(&table, i % 2, i), 9 + i); /* rather shared than not mapped */
	for (uint32_t i = 0; i < 9; i++)
		CHECK_EQ(give(&table, 0, 100 % BLOCKS + SLAB_BLOCKS + i), i);
	for (uint32_t i = 13; i < BLOCKS; i++)
		CHECK_EQ(give(&table, 1, i), i);
	CHECK_EQ(iswi_far_places_used(&table), BLOCKS);
	CHECK_EQ(iswi_far_place_get(&table, 0, 19, true, &place), -ENOSPC);
	mapped = UINT32_MAX;
	iswi_far_table_close(&table);
	close(fd);
}

/* Gives and takes back without end. */
static void churn(int fd, uint64_t random)
{
	struct iswi_far_table table;

	open_table(&table, fd, false);
	for (;;) {
		uint32_t client = below(&random, 2), number = below(&random, BLOCKS), place;

		if (iswi_far_place_get(&table, client, number, true, &place) != 0)
			continue;
		iswi_far_place_put(&table, place);
		if (below(&random, 2))
			take_back(&table, client, number);
	}
}

/* The process may be killed after each store: the next one always understands what it finds. */
TEST(a_kill_while_the_table_is_written_spoils_nothing)
{
	uint64_t random = iswi_now_ns() | 1;
	struct iswi_far_table table;
	int fd = new_file(), status;

	open_table(&table, fd, true);
	use_client(&table, 0, 100);
	use_client(&table, 1, 200);
	iswi_far_table_close(&table);
	for (uint32_t i = 0; i < 100; i++) {
		uint64_t seed = draw(&random) | 1;
		pid_t pid = fork();

		CHECK(pid >= 0);
		if (pid == 0)
			churn(fd, seed);
		pause_us(below(&random, 3000));
		CHECK_EQ(kill(pid, SIGKILL), 0);
		CHECK_EQ(waitpid(pid, &status, 0), pid);
		CHECK(WIFSIGNALED(status));
		open_table(&table, fd, false);
		iswi_far_table_close(&table);
	}
	close(fd);
}
