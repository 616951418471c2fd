CREATE TABLE IF NOT EXISTS `project.dataset.flights` (
  `release_id` STRING NOT NULL,
  `window_start` TIMESTAMP,
  `window_end` TIMESTAMP,
  `trigger` INT64,
  `trigger_time` TIMESTAMP,
  `origin` STRING,
  `carrier` STRING,
  `flights` FLOAT64,
  `flights_sd` FLOAT64,
  `mean_delay` FLOAT64,
  `mean_delay_sd` FLOAT64,
  `plan_hash` STRING,
  `run_id` STRING,
  PRIMARY KEY (`release_id`) NOT ENFORCED
) CLUSTER BY `release_id`
OPTIONS (description="{\"guarantee\":{\"sound\":true,\"epsilon\":6.0,\"delta\":1e-9,\"covers\":\"7 days\",\"neighbours\":\"two inputs are neighbours if one has, in addition, all records of one unit; every other record keeps its content and its source stamp\"},\"lifetime\":{\"periods\":52,\"epsilon\":65.5595,\"delta\":2.14e-8},\"unit\":{\"column\":\"tailnum\",\"text\":\"all records with one value of 'tailnum' whose event time lies in one period of 7 days\"},\"values\":[{\"column\":\"flights\",\"kind\":\"count\",\"of\":null,\"bounds\":null,\"grid\":1.0},{\"column\":\"mean_delay\",\"kind\":\"mean\",\"of\":\"dep_delay\",\"bounds\":[-60.0,60.0],\"grid\":1.0}]}",
  labels=[("dpstream_plan", "560b410ee9a599ef323b716606d58482"), ("dpstream_epsilon", "6_0"), ("dpstream_delta", "1e-09"), ("dpstream_covers", "7_days"), ("dpstream_unit", "tailnum"), ("dpstream_contributions", "8")]);
CREATE TABLE IF NOT EXISTS `project.dataset.flights_seals` (
  `name` STRING NOT NULL,
  `run_id` STRING,
  `value` STRING,
  PRIMARY KEY (`name`) NOT ENFORCED
) CLUSTER BY `name`;
